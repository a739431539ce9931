"""What was kept of a prompt and why: gathered from a prefill's result, then drawn as a page and a picture."""
