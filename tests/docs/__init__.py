"""Pages: what they link to, run, show and copy from the code."""
