"""The tests mirror genie/; house/ holds the rules of the house itself."""
