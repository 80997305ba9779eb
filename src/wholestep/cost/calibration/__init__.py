"""In: this host. Out: its measured speeds in a file. What is made of them is `cost`."""
