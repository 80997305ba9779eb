"""The one intermediate representation: a step as a functional graph of ATen and collective nodes."""
