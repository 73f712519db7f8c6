"""``serve``: what fits a T4G, the command line that says so, and the server as a child."""
