//! Framing and field encoding of the client protocol.
//!
//! ```text
//! +0  u32 magic    "VNPC"
//! +4  u8  version  1
//! +5  u8  kind     which message
//! +6  u16 reserved 0
//! +8  u32 len      bytes of payload that follow, at most MAX_PAYLOAD
//! +12 u32 id       the request's number, repeated in its answer; 0 = unasked
//! +16 u32 app      the guest application; 0 on a Unix socket
//! +20 u32 check    the five words before, XORed, and XORed with CHECK_SALT
//! ```
//!
//! The check word lets a reader of a byte channel (a tty, a virtio-serial port) find the next
//! message after garbage: it skips to the next magic whose header checks.
//!
//! Fields are little-endian integers; a string or byte string is a `u32` length and the bytes; a
//! list is a `u32` count and the elements.

/// `VNPC` in memory order.
pub const MAGIC: u32 = u32::from_le_bytes(*b"VNPC");
/// Bytes of a header.
pub const HEADER: usize = 24;
/// Longest payload in bytes: the counters of more than sixteen thousand ports.
pub const MAX_PAYLOAD: usize = 16 << 20;
/// Longest payload a daemon takes from a client, in bytes: the longest message to a back-end, and its fields.
/// Answers may be longer.
pub const MAX_REQUEST: usize = (64 << 10) + 64;

const CHECK_SALT: u32 = 0x7650_6c67;

/// The header of one message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Protocol version.
    pub version: u8,
    /// Which message; see [`super::Message::kind`].
    pub kind: u8,
    /// Bytes of payload.
    pub len: u32,
    /// The request's number; 0 = unasked.
    pub id: u32,
    /// The guest application; 0 on a Unix socket.
    pub app: u32,
}

/// Bytes that are no message. The sender's fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Malformed {
    /// The header does not start with [`MAGIC`] or its check word is wrong.
    Header,
    /// The payload is longer than allowed.
    TooLong(u32),
    /// A version this side does not speak.
    Version(u8),
    /// No message has this kind.
    Kind(u8),
    /// The payload ends inside the named field.
    Short(&'static str),
    /// The named field has an impossible value.
    Value(&'static str, u64),
    /// The named string is not UTF-8.
    Utf8(&'static str),
}

impl Header {
    /// The header as it travels.
    pub fn encode(&self) -> [u8; HEADER] {
        let words = [
            MAGIC,
            u32::from(self.version) | u32::from(self.kind) << 8,
            self.len,
            self.id,
            self.app,
        ];
        let check = words.iter().fold(CHECK_SALT, |check, word| check ^ word);
        let mut bytes = [0; HEADER];
        for (field, word) in bytes.chunks_exact_mut(4).zip(words.iter().chain([&check])) {
            field.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a header; the version is not judged here.
    ///
    /// # Errors
    /// [`Malformed::Header`] or [`Malformed::TooLong`].
    pub fn decode(bytes: &[u8; HEADER], max_payload: usize) -> Result<Self, Malformed> {
        let mut words = [0_u32; 6];
        for (word, field) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([field[0], field[1], field[2], field[3]]);
        }
        let [magic, kind, len, id, app, check] = words;
        if magic != MAGIC || magic ^ kind ^ len ^ id ^ app ^ CHECK_SALT != check || kind >> 16 != 0
        {
            return Err(Malformed::Header);
        }
        if len as usize > max_payload {
            return Err(Malformed::TooLong(len));
        }
        Ok(Self {
            version: kind as u8,
            kind: (kind >> 8) as u8,
            len,
            id,
            app,
        })
    }
}

/// Collects received bytes and cuts them into messages, whatever pieces they come in.
#[derive(Debug)]
pub struct Framer {
    bytes: Vec<u8>,
    start: usize,
    max_payload: usize,
    resync: bool,
    skipped: u64,
}

impl Framer {
    /// For a Unix socket, where garbage is an error.
    pub fn strict(max_payload: usize) -> Self {
        Self {
            bytes: Vec::new(),
            start: 0,
            max_payload,
            resync: false,
            skipped: 0,
        }
    }

    /// For a byte channel whose other end may restart in the middle of a message: garbage is
    /// skipped and counted.
    pub fn resyncing(max_payload: usize) -> Self {
        Self {
            resync: true,
            ..Self::strict(max_payload)
        }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, or `None` until more bytes come.
    ///
    /// # Errors
    /// [`Malformed`] on a strict framer; the connection must be closed.
    pub fn next_message(&mut self) -> Result<Option<(Header, Vec<u8>)>, Malformed> {
        loop {
            let rest = &self.bytes[self.start..];
            let Some(head) = rest.first_chunk::<HEADER>() else {
                return Ok(None);
            };
            match Header::decode(head, self.max_payload) {
                Ok(header) => {
                    let end = HEADER + header.len as usize;
                    if rest.len() < end {
                        return Ok(None);
                    }
                    let payload = rest[HEADER..end].to_vec();
                    self.start += end;
                    return Ok(Some((header, payload)));
                }
                Err(malformed) if !self.resync => return Err(malformed),
                Err(_) => {
                    let magic = MAGIC.to_le_bytes();
                    let next = rest[1..].iter().position(|&byte| byte == magic[0]);
                    let skip = next.map_or(rest.len(), |at| at + 1);
                    self.start += skip;
                    self.skipped += skip as u64;
                }
            }
        }
    }

    /// Bytes of garbage skipped so far.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Forgets a half-received message; the channel was reset.
    pub fn reset(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }
}

/// Writes fields.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Leaves room for a header, which is written when the length is known.
    pub fn behind_header() -> Self {
        Self {
            bytes: vec![0; HEADER],
        }
    }

    /// What was written.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Writes one byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Writes a `u16`.
    pub fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a `u32`.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes a `u64`.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Writes bytes whose number both sides know.
    pub fn array<const N: usize>(&mut self, value: &[u8; N]) {
        self.bytes.extend_from_slice(value);
    }

    /// Writes a length and the bytes.
    pub fn bytes(&mut self, value: &[u8]) {
        self.u32(value.len() as u32);
        self.bytes.extend_from_slice(value);
    }

    /// Writes a length and the text.
    pub fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    /// Writes a count and the elements.
    pub fn list<T>(&mut self, items: &[T], mut one: impl FnMut(&mut Self, &T)) {
        self.u32(items.len() as u32);
        for item in items {
            one(self, item);
        }
    }
}

/// Reads fields.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Reads from `payload`.
    pub fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    /// Reads one byte.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn u8(&mut self, field: &'static str) -> Result<u8, Malformed> {
        Ok(self.array::<1>(field)?[0])
    }

    /// Reads a `u16`.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn u16(&mut self, field: &'static str) -> Result<u16, Malformed> {
        self.array(field).map(u16::from_le_bytes)
    }

    /// Reads a `u32`.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        self.array(field).map(u32::from_le_bytes)
    }

    /// Reads a `u32` that was appended to a message later; 0 where the payload ends before it.
    ///
    /// # Errors
    /// [`Malformed::Short`] if the payload ends within it.
    pub fn appended_u32(&mut self, field: &'static str) -> Result<u32, Malformed> {
        if self.rest.is_empty() {
            return Ok(0);
        }
        self.u32(field)
    }

    /// True where the payload ends: what is read further on was appended to the message later.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads a `u64` that was appended to a message later; 0 where the payload ends before it.
    ///
    /// # Errors
    /// [`Malformed::Short`] if the payload ends within it.
    pub fn appended_u64(&mut self, field: &'static str) -> Result<u64, Malformed> {
        if self.rest.is_empty() {
            return Ok(0);
        }
        self.u64(field)
    }

    /// Reads a `u64`.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn u64(&mut self, field: &'static str) -> Result<u64, Malformed> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// Reads a byte string.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn bytes(&mut self, field: &'static str) -> Result<&'a [u8], Malformed> {
        let len = self.u32(field)? as usize;
        let (bytes, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(Malformed::Short(field))?;
        self.rest = rest;
        Ok(bytes)
    }

    /// Reads a string.
    ///
    /// # Errors
    /// [`Malformed::Short`] or [`Malformed::Utf8`].
    pub fn text(&mut self, field: &'static str) -> Result<String, Malformed> {
        let text = std::str::from_utf8(self.bytes(field)?).map_err(|_| Malformed::Utf8(field))?;
        Ok(text.to_owned())
    }

    /// Reads a list.
    ///
    /// # Errors
    /// Those of `one`, and [`Malformed::Value`] for a count that the payload cannot hold.
    pub fn list<T>(
        &mut self,
        field: &'static str,
        mut one: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let count = self.u32(field)?;
        // Every element takes at least one byte, so the payload bounds the allocation.
        if count as usize > self.rest.len() {
            return Err(Malformed::Value(field, u64::from(count)));
        }
        (0..count).map(|_| one(self)).collect()
    }

    /// Reads bytes whose number both sides know.
    ///
    /// # Errors
    /// [`Malformed::Short`].
    pub fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], Malformed> {
        let (head, rest) = self
            .rest
            .split_first_chunk::<N>()
            .ok_or(Malformed::Short(field))?;
        self.rest = rest;
        Ok(*head)
    }

    /// Reads a byte that is 0 or 1.
    ///
    /// # Errors
    /// [`Malformed::Short`] or [`Malformed::Value`].
    pub fn flag(&mut self, field: &'static str) -> Result<bool, Malformed> {
        self.one_of(field, &[false, true])
    }

    /// Reads a byte that numbers one of `values`.
    ///
    /// # Errors
    /// [`Malformed::Short`] or [`Malformed::Value`].
    pub fn one_of<T: Copy>(&mut self, field: &'static str, values: &[T]) -> Result<T, Malformed> {
        let number = self.u8(field)?;
        values
            .get(usize::from(number))
            .copied()
            .ok_or(Malformed::Value(field, u64::from(number)))
    }
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Header => f.write_str("this is not a vnplug message"),
            Self::TooLong(len) => write!(f, "a message of {len} bytes is too long"),
            Self::Version(version) => {
                write!(
                    f,
                    "protocol version {version} is not spoken here, update one side"
                )
            }
            Self::Kind(kind) => write!(f, "no message has kind {kind}"),
            Self::Short(field) => write!(f, "the message ends inside its field {field}"),
            Self::Value(field, value) => write!(f, "the field {field} cannot be {value}"),
            Self::Utf8(field) => write!(f, "the field {field} is not UTF-8"),
        }
    }
}

impl std::error::Error for Malformed {}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &[u8]) -> Vec<u8> {
        let header = Header {
            version: 1,
            kind: 9,
            len: payload.len() as u32,
            id: 7,
            app: 3,
        };
        let mut bytes = header.encode().to_vec();
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn any_split_of_the_stream_gives_the_same_messages() {
        let stream: Vec<u8> = [message(b"one"), message(b""), message(b"three")].concat();
        for cut in 0..=stream.len() {
            let mut framer = Framer::strict(100);
            let mut got = Vec::new();
            for piece in [&stream[..cut], &stream[cut..]] {
                framer.push(piece);
                while let Some((header, payload)) = framer.next_message().unwrap() {
                    assert_eq!((header.id, header.app, header.kind), (7, 3, 9));
                    got.push(payload);
                }
            }
            assert_eq!(got, [b"one".to_vec(), b"".to_vec(), b"three".to_vec()]);
        }
    }

    #[test]
    fn garbage_closes_a_strict_framer_and_is_skipped_by_a_resyncing_one() {
        let garbage = b"VNPVNPCxxxxxxxxxxxxxxxxxxxxxxxxxx";
        let stream: Vec<u8> = [&garbage[..], &message(b"ok")].concat();
        let mut strict = Framer::strict(100);
        strict.push(&stream);
        assert_eq!(strict.next_message(), Err(Malformed::Header));
        let mut resyncing = Framer::resyncing(100);
        resyncing.push(&stream);
        assert_eq!(resyncing.next_message().unwrap().unwrap().1, b"ok");
        assert_eq!(resyncing.skipped(), garbage.len() as u64);
    }

    #[test]
    fn a_flipped_bit_anywhere_in_the_header_is_noticed() {
        let good = message(b"");
        for bit in 0..HEADER * 8 {
            let mut bad: [u8; HEADER] = good[..].try_into().unwrap();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(
                Header::decode(&bad, 1 << 20),
                Err(Malformed::Header),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn too_long_is_refused_before_anything_is_allocated() {
        let header = Header {
            version: 1,
            kind: 1,
            len: u32::MAX,
            id: 0,
            app: 0,
        };
        assert_eq!(
            Header::decode(&header.encode(), 100),
            Err(Malformed::TooLong(u32::MAX))
        );
    }

    #[test]
    fn a_list_count_beyond_the_payload_is_refused() {
        let mut writer = Writer::default();
        writer.u32(u32::MAX);
        let bytes = writer.into_bytes();
        let list = Reader::new(&bytes).list("ports", |reader| reader.u32("port"));
        assert_eq!(list, Err(Malformed::Value("ports", u64::from(u32::MAX))));
    }
}
