"""Programs that run inside the installed environment, under emulation: no tests themselves."""
