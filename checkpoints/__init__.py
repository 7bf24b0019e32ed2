"""What is shipped ready-made: the trained policy and the draft of the embedded model (data only)."""
