"""Speed: how close a call comes to what the device can do at best. No verdict depends on it."""
