//! Names of a recording's files: `NAME-SEQ-START.pcapng`, its index `.vnx`, its flows
//! `.flows.parquet`, and `NAME.state`.

use std::fmt;
use std::path::{Path, PathBuf};

use vnplug_ring::units;

/// What the name of a segment file says.
///
/// `SEQ` has ten decimal digits and grows over all disks of a recording and over restarts; `START`
/// is the time of the segment's first packet, as `20261121T134501.123456789Z`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentName {
    /// The recording.
    pub recording: String,
    /// The segment's number in the recording.
    pub sequence: u64,
    /// Time of the first packet, nanoseconds since 1970 UTC.
    pub start_ns: u64,
    /// Its format.
    pub format: Format,
}

/// The file formats of segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// pcapng: interfaces, drop counts, comments, statistics.
    Pcapng,
    /// Classic pcap with nanoseconds.
    Pcap,
}

impl Format {
    /// The extension of its files, without the dot.
    pub fn extension(self) -> &'static str {
        match self {
            Self::Pcapng => "pcapng",
            Self::Pcap => "pcap",
        }
    }
}

impl SegmentName {
    /// Reads a file name; `None` if it is not a segment's. One that is [packed](Packing) has the name of
    /// the segment that it was.
    pub fn parse(file: &str) -> Option<Self> {
        let (stem, extension) = unpacked(file).0.rsplit_once('.')?;
        let format = match extension {
            "pcapng" => Format::Pcapng,
            "pcap" => Format::Pcap,
            _ => return None,
        };
        let (rest, start) = stem.rsplit_once('-')?;
        let (recording, sequence) = rest.rsplit_once('-')?;
        if !is_recording_name(recording) || sequence.len() != SEQUENCE_DIGITS {
            return None;
        }
        Some(Self {
            recording: recording.to_owned(),
            sequence: digits(sequence)?,
            start_ns: parse_time(start)?,
            format,
        })
    }

    /// The name of the segment's index.
    pub fn index(&self) -> String {
        format!("{}.vnx", self.stem())
    }

    fn stem(&self) -> String {
        let start = time(self.start_ns);
        format!("{}-{:010}-{start}", self.recording, self.sequence)
    }
}

impl fmt::Display for SegmentName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.stem(), self.format.extension())
    }
}

/// The highest number of a segment.
pub const LAST_SEQUENCE: u64 = 9_999_999_999;
/// How a closed file was packed: compressed first, then encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Packing {
    /// By zstd: `.zst`.
    pub zstd: bool,
    /// By age: `.age`.
    pub age: bool,
}

impl Packing {
    /// All there are; the first is none.
    pub const ALL: [Self; 4] = [
        Self {
            zstd: false,
            age: false,
        },
        Self {
            zstd: true,
            age: false,
        },
        Self {
            zstd: true,
            age: true,
        },
        Self {
            zstd: false,
            age: true,
        },
    ];

    /// What is behind the file's name.
    pub fn suffix(self) -> &'static str {
        match (self.zstd, self.age) {
            (false, false) => "",
            (true, false) => ".zst",
            (false, true) => ".age",
            (true, true) => ".zst.age",
        }
    }
}

/// What a file was called before it was packed.
pub fn unpacked(file: &str) -> (&str, Packing) {
    let (file, age) = match file.strip_suffix(".age") {
        Some(file) => (file, true),
        None => (file, false),
    };
    match file.strip_suffix(".zst") {
        Some(file) => (file, Packing { zstd: true, age }),
        None => (file, Packing { zstd: false, age }),
    }
}

/// As [`unpacked`], for a whole path.
pub fn unpacked_path(path: &Path) -> (PathBuf, Packing) {
    match path
        .file_name()
        .and_then(|name| name.to_str())
        .map(unpacked)
    {
        Some((name, packing)) => (path.with_file_name(name), packing),
        None => (path.to_owned(), Packing::default()),
    }
}

/// Whether a recording may have this name: 1 to 64 of letters, digits, `.`, `_` and `-`, and it does
/// not begin with `.` or `-`.
pub fn is_recording_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && !name.starts_with(['.', '-'])
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// The name of a recording's state file.
pub fn state_file(recording: &str) -> String {
    format!("{recording}.state")
}

/// The name of the file in which `vnplug query` keeps the flows of a capture file: that of a segment
/// has its stem, as its index; that of any other file its whole name, of which there is but one.
pub fn flows_file(capture: &str) -> String {
    let stem = CAPTURES.iter().find_map(|extension| {
        let (stem, _) = capture.split_once(extension)?;
        SegmentName::parse(&format!("{stem}.pcapng")).map(|_| stem)
    });
    format!("{}{FLOWS}", stem.unwrap_or(capture))
}

/// A time (nanoseconds since 1970 UTC) as in a file name: `20261121T134501.123456789Z`.
pub fn time(ns: u64) -> String {
    let (seconds, fraction) = (ns / 1_000_000_000, ns % 1_000_000_000);
    let (year, month, day) = units::civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}{month:02}{day:02}T{hour:02}{minute:02}{second:02}.{fraction:09}Z")
}

/// Reads what [`time`] writes.
pub fn parse_time(text: &str) -> Option<u64> {
    let bytes = text.as_bytes();
    if !text.is_ascii()
        || bytes.len() != 26
        || bytes[8] != b'T'
        || bytes[15] != b'.'
        || bytes[25] != b'Z'
    {
        return None;
    }
    let part = |from: usize, to: usize| digits(&text[from..to]);
    let (year, month, day) = (part(0, 4)?, part(4, 6)?, part(6, 8)?);
    let (hour, minute, second) = (part(9, 11)?, part(11, 13)?, part(13, 15)?);
    let valid = (1970..=2500).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60;
    if !valid {
        return None;
    }
    let seconds = units::days(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    let ns = seconds * 1_000_000_000 + part(16, 25)?;
    // A 31st of June is no date.
    (time(ns) == text).then_some(ns)
}

fn digits(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

/// The extension of an index.
pub const INDEX: &str = ".vnx";
/// After the name of a file that is not whole yet.
pub const PART: &str = ".part";
/// What is beside a segment and goes with it: its index, its flows, and those that are being made.
pub(crate) const COMPANIONS: [&str; 3] = [INDEX, FLOWS, ".flows.parquet.tmp"];
const FLOWS: &str = ".flows.parquet";
const CAPTURES: [&str; 2] = [".pcapng", ".pcap"];
/// Names sort as numbers.
const SEQUENCE_DIGITS: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_and_read() {
        let at = |text| parse_time(text).unwrap();
        assert_eq!(at("19700101T000000.000000000Z"), 0);
        assert_eq!(at("20261121T134501.123456789Z"), 1_795_268_701_123_456_789);
        assert_eq!(at("20240229T235959.999999999Z"), 1_709_251_199_999_999_999);
        for day in 0..60_000_u64 {
            let ns = day * 86_400 * 1_000_000_000 + 7;
            assert_eq!(parse_time(&time(ns)), Some(ns), "{}", time(ns));
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "20230229T000000.000000000Z",
            "20260631T000000.000000000Z",
            "20261121T240000.000000000Z",
            "20261121t134501.123456789Z",
            "20261121T134501.12345678Z",
            "2026112+T134501.123456789Z",
            "20261121T134501.12345678éZ",
        ] {
            assert_eq!(parse_time(text), None, "{text}");
        }
    }

    #[test]
    fn a_segment_name_is_read_back() {
        let name = SegmentName {
            recording: "edge-7".into(),
            sequence: 42,
            start_ns: 1_795_268_701_123_456_789,
            format: Format::Pcapng,
        };
        let file = "edge-7-0000000042-20261121T134501.123456789Z";
        assert_eq!(name.to_string(), format!("{file}.pcapng"));
        assert_eq!(SegmentName::parse(&name.to_string()), Some(name.clone()));
        assert_eq!(name.index(), format!("{file}.vnx"));
        for packing in Packing::ALL {
            let packed = format!("{name}{}", packing.suffix());
            assert_eq!(SegmentName::parse(&packed), Some(name.clone()));
            assert_eq!(unpacked(&packed), (name.to_string().as_str(), packing));
        }
        for file in [
            "edge.pcapng",
            "edge-7.pcapng",
            "edge-42-20261121T134501.123456789Z.pcapng",
            "-0000000042-20261121T134501.123456789Z.pcapng",
            "edge-0000000042-20261121T134501.123456789Z.vnx",
            "edge-7-0000000042-20261121T134501.123456789Z.pcapng.zst.part",
        ] {
            assert_eq!(SegmentName::parse(file), None, "{file}");
        }
        let flows = format!("{file}.flows.parquet");
        for end in ["pcapng", "pcap", "pcapng.zst", "pcapng.zst.age"] {
            assert_eq!(flows_file(&format!("{file}.{end}")), flows);
        }
        assert_eq!(flows_file("old.pcap"), "old.pcap.flows.parquet");
    }
}
