"""The service on trial, with real processes: what ``soak`` and ``chaos`` are built of."""
