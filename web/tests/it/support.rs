//! Recordings for the tests, the server, and an HTTP client of the simplest kind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use vnplug::{Meta, Packet as PortPacket};
use vnplug_frame::capfile::write::Interface as PortInterface;
use vnplug_store::disk::{Buffer, Real};
use vnplug_store::extract::{Format, Output, Packet};
use vnplug_store::index::rebuild;
use vnplug_store::read::Interface;
use vnplug_store::record::{Recorder, Settings};
pub(crate) use vnplug_testing::TestDir;
use vnplug_testing::{PATIENCE, eventually};

pub(crate) const SECOND: u64 = 1_000_000_000;
/// 2026-11-21T13:45:00Z.
pub(crate) const START: u64 = 1_795_268_700 * SECOND;

/// A UDP frame of `len` bytes to this port.
pub(crate) fn udp(port: u16, len: usize) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0]);
    frame.extend((len as u16 - 14).to_be_bytes());
    frame.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 1, 2, 3, 10, 9, 9, 9]);
    frame.extend(1000_u16.to_be_bytes());
    frame.extend(port.to_be_bytes());
    frame.resize(len, 0);
    frame
}

/// Writes a segment of these packets (time, frame) and its index.
pub(crate) fn segment<'a>(
    dir: &Path,
    sequence: u64,
    packets: impl IntoIterator<Item = (u64, &'a [u8])>,
) -> PathBuf {
    let interface = Interface::ethernet();
    let mut packets = packets.into_iter().peekable();
    let start = packets.peek().map_or(0, |(ts_ns, _)| *ts_ns);
    let name = format!(
        "rec-{sequence:010}-{}.pcapng",
        vnplug_store::name::time(start)
    );
    let path = dir.join(name);
    let mut output = Output::new(File::create(&path).unwrap(), Format::Pcapng);
    for (ts_ns, bytes) in packets {
        let packet = Packet {
            ts_ns,
            bytes,
            wire_len: bytes.len() as u32,
            flags: 0,
            lost: 0,
            comment: "",
            interface: &interface,
        };
        output.write(&packet).unwrap();
    }
    output.finish().unwrap();
    rebuild(&path).unwrap();
    path
}

/// A recorder at work in a directory.
pub(crate) fn recorder(dir: &Path) -> Recorder {
    let interface = PortInterface {
        name: "lab".into(),
        link_type: 1,
        snaplen: 0,
        filter: String::new(),
    };
    let settings = Settings {
        chunk_bytes: 1 << 20,
        sync_every: Duration::ZERO,
        ..Settings::new("live", vec![interface])
    };
    let buffers = (0..8).map(|id| Buffer::new(1 << 20, id)).collect();
    let disk = Box::new(Real::new(false).0);
    Recorder::start(settings, vec![(dir.to_owned(), disk)], buffers).unwrap()
}

pub(crate) fn take(recorder: &mut Recorder, ts_ns: u64, bytes: &[u8], lost: u32) {
    let meta = Meta {
        ts_ns,
        wire_len: bytes.len() as u32,
        flow_hash: 0,
        lost,
        flags: 0,
        vlan_tci: 0,
        source: 0,
        queue: 0,
        ..Meta::default()
    };
    let packet = PortPacket { meta, bytes };
    assert!(recorder.take(0, &packet, &mut || false));
}

/// vnplug-web at work.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    pub(crate) fn start(places: &[&Path]) -> Self {
        Self::start_by(Command::new(env!("CARGO_BIN_EXE_vnplug-web")), places)
    }

    pub(crate) fn start_by(mut command: Command, places: &[&Path]) -> Self {
        command.args(["--listen", "127.0.0.1:0"]).args(places);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("vnplug-web: http://");
        let address = address.and_then(|rest| rest.strip_suffix('/'));
        let Some(address) = address.and_then(|text| text.parse().ok()) else {
            let _ = child.kill();
            panic!("{line:?}, {:?}", child.wait());
        };
        Self { child, address }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[("Host", &self.address.to_string())])
    }

    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        ask(self.address, method, path, headers, b"").unwrap()
    }

    /// The JSON of an answer that is fine.
    pub(crate) fn json(&self, path: &str) -> Value {
        let answer = self.get(path);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// The timeline, when everything was looked at.
    pub(crate) fn timeline(&self, parameters: &str) -> Value {
        let mut last = Value::Null;
        eventually("all is read", || {
            last = self.json(&format!("/api/timeline?{parameters}"));
            last["pending_bytes"] == 0
        });
        last
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a server said.
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in small letters.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known == name);
        found.map_or("", |(_, value)| value)
    }
}

/// One request on a connection of its own.
pub(crate) fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<Answer> {
    let mut stream = BufReader::new(begin(address, method, path, headers, body)?);
    let mut answer = head(&mut stream)?;
    if answer.header("transfer-encoding") == "chunked" {
        loop {
            let mut line = String::new();
            stream.read_line(&mut line)?;
            let len = usize::from_str_radix(line.trim(), 16)
                .map_err(|_| std::io::Error::other(format!("cut short at {line:?}")))?;
            let mut piece = vec![0; len + 2];
            stream.read_exact(&mut piece)?;
            if len == 0 {
                break;
            }
            answer.body.extend_from_slice(&piece[..len]);
        }
    } else if let Ok(len) = answer.header("content-length").parse() {
        answer.body.resize(len, 0);
        stream.read_exact(&mut answer.body)?;
    } else {
        stream.read_to_end(&mut answer.body)?;
    }
    Ok(answer)
}

/// Sends a request.
pub(crate) fn begin(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text += &format!("Content-Length: {}\r\n\r\n", body.len());
    stream.write_all(&[text.as_bytes(), body].concat())?;
    Ok(stream)
}

/// Reads up to the end of the headers.
pub(crate) fn head(stream: &mut impl BufRead) -> std::io::Result<Answer> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let status = line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let mut answer = Answer {
        status: status.ok_or_else(|| std::io::Error::other(format!("no answer: {line:?}")))?,
        headers: Vec::new(),
        body: Vec::new(),
    };
    loop {
        line.clear();
        stream.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(':') else {
            return Ok(answer);
        };
        answer
            .headers
            .push((name.to_lowercase(), value.trim().to_owned()));
    }
}

/// Text as a part of an address.
pub(crate) fn encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte.is_ascii_alphanumeric() {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect()
}

/// How many packets tcpdump finds in a file.
pub(crate) fn by_tcpdump(file: &Path, filter: &str) -> usize {
    let output = Command::new("tcpdump")
        .arg("-nr")
        .arg(file)
        .arg(filter)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout.iter().filter(|&&byte| byte == b'\n').count()
}

/// What a recording has for a filter and a range of time, as `vnplug extract` writes it.
pub(crate) fn extracted(places: &[&Path], from_ns: u64, to_ns: u64, filter: &str) -> Vec<u8> {
    use vnplug_store::extract::{Extract, Query};
    use vnplug_store::filter::Filter;
    let filter = Filter::new(filter).unwrap();
    let places: Vec<PathBuf> = places.iter().map(|place| place.to_path_buf()).collect();
    let query = Query {
        from_ns,
        to_ns,
        filter,
    };
    let mut search = Extract::open(&places, query).unwrap();
    let mut output = Output::new(Vec::new(), Format::Pcapng);
    while let Some(packet) = search.read().unwrap() {
        output.write(&packet).unwrap();
    }
    output.finish().unwrap()
}
