"""What a running server is doing, for people: the last minutes of its steps, a page that draws them, a dashboard."""
