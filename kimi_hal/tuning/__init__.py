"""Selection by measurement: time the candidates of an operator on this device and write down which was fastest."""
