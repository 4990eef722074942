"""Invariants, held over inputs that hypothesis makes up."""
