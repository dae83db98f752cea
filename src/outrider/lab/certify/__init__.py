"""The certificate: tests that speculation did not change the output, and what they found."""
