"""Two dumps compared: the report, its page and pictures, and the command."""
