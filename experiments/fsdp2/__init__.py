"""A plan run by FSDP2: its predicted step and memory, and the exported file with them."""
