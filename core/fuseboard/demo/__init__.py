"""What ``fuseboard demo`` shows: a pretrained model that answers questions about Python."""
