"""Options and tables that commands share. No command stands here."""
