"""An authority for the tests of TLS, and the files that it signs."""

import trustme


class Authority:
    """Writes its certificate, and those that it signs, into a folder that it makes."""

    def __init__(self, folder, name="authority"):
        folder.mkdir(exist_ok=True)
        self.folder, self._authority = folder, trustme.CA()
        self.file = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name, *identities, **options):
        """The paths of a certificate chain and of its key; options as trustme's: `common_name`, `not_after`."""
        issued = self._authority.issue_cert(*identities, **options)
        chain, key = self.folder / f"{name}.chain.pem", self.folder / f"{name}.key.pem"
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return chain, key
