//! pcapng files, as [`crate::pcap`].

/// Checks it with these bytes, before which a section begins if they do not begin one.
pub fn check(bytes: &[u8]) {
    const SECTION: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
    if bytes.starts_with(&SECTION) {
        crate::pcap::compare(bytes);
        return;
    }
    let mut file = SECTION.to_vec();
    for word in [28_u32, 0x1a2b_3c4d, 1, u32::MAX, u32::MAX, 28] {
        file.extend(word.to_le_bytes());
    }
    file.extend(bytes);
    crate::pcap::compare(&file);
}
