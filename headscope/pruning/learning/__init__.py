"""Gates that learn which heads go."""
