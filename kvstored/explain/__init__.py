"""Why a block is found or missed, and how often."""
