"""This package compares each faster way to compute on a GPU with the plain one, on the device, before it is used."""
