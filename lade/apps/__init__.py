"""What people start: commands, comparisons, a chat, a server. The library imports nothing of it."""
