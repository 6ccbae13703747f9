"""What measured training steps tell of a machine, and which layouts to try next."""
