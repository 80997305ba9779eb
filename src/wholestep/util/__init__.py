"""Small helpers of Python and of torch; nothing here knows torch programs or imports another room."""
