"""Small helpers of Python; nothing here knows torch programs or imports another room."""
