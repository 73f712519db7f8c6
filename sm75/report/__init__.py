"""``report.html``: what was built from what, how it was checked, and what to do next."""
