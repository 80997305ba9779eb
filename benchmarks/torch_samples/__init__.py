"""The samples that torch tests its own operators and modules with, trained compiled and as eager code."""
