"""Reading pages back, as text and in a browser."""
