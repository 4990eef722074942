"""The commands of `grid-cli`, which `genie grid` offers too."""
