"""File and object storage access, the lowest layer. Imports only ``toolkit.errors`` from the other packages."""
