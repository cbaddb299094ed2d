"""Two dumps side by side: the report, its page and pictures, and the command."""
