"""Decides who may do what. Pure: values in, a decision or an error with its reason out."""
