"""The commands of `genie`, except those of `genie grid`."""
