"""The ZeRO family and torch's FSDP: sharded units, their messages, and their memory."""
