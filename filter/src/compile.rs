//! From an expression to a [`Program`]: asks the compiling process, remembers what it answered.
//!
//! See [`child`](super::child) for the other side. Costs on a 2-core machine: about 0.25 ms for an
//! expression that was not seen before, about 2 ms more for the first one (a process starts).

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::child::{MAX_REPLY_BYTES, status};
use super::program::Program;
use vnplug_bpf::{INSTRUCTION_BYTES, Trust, VerifyError};

/// Compiles expressions; belongs to one thread, which may block for [`WALL_LIMIT`] per expression.
#[derive(Debug)]
pub struct Compiler {
    exe: PathBuf,
    service: Option<Service>,
    cache: Cache,
}

impl Compiler {
    /// A compiler that starts `exe` with [`COMPILE_FILTER_ARG`] when it is first needed.
    ///
    /// The daemon passes `/proc/self/exe`.
    pub fn new(exe: PathBuf) -> Self {
        Self {
            exe,
            service: None,
            cache: Cache::default(),
        }
    }

    /// Forgets the compiling process, whatever state it is in; the next expression starts another.
    pub fn reset(&mut self) {
        self.service = None;
    }

    /// Starts the compiling process now: while the daemon still has the privileges to make it
    /// nobody.
    ///
    /// # Errors
    /// [`FilterError::Start`] or [`FilterError::NoLibpcap`]; compiling tries again.
    pub fn start(&mut self) -> Result<(), FilterError> {
        self.service = Some(Service::start(&self.exe)?);
        Ok(())
    }

    /// Compiles a pcap-filter expression for frames of `link_type` (1 is Ethernet), accepting
    /// `snaplen` bytes of each frame that matches. No text at all matches every frame.
    ///
    /// The program is verified with [`Trust::Operator`]: `protochain` loops, on the meter. A caller
    /// that wants no loops checks [`Program::loops`].
    ///
    /// Host names resolve from `/etc/hosts` only, service and protocol names from their files.
    /// `inbound` and `outbound` are refused: a ring's frames carry no direction.
    ///
    /// # Errors
    /// [`FilterError`]; every kind but `Start` and `NoLibpcap` is the writer's fault. None of them
    /// affects the next call.
    pub fn compile(
        &mut self,
        expression: &str,
        snaplen: u32,
        link_type: u32,
    ) -> Result<Program, FilterError> {
        if expression.len() > MAX_EXPRESSION_BYTES {
            return Err(FilterError::TooLong {
                len_bytes: expression.len(),
            });
        }
        if let Some(at) = expression.bytes().position(|byte| byte == 0) {
            return Err(FilterError::Nul { at });
        }
        if snaplen == 0 {
            return Err(FilterError::Refused(
                "snaplen of 0 rejects all packets".to_owned(),
            ));
        }
        if expression.trim_ascii().is_empty() {
            return Ok(Program::accept(snaplen));
        }
        let key = (expression.to_owned(), snaplen, link_type);
        if let Some(program) = self.cache.find(&key) {
            return Ok(program);
        }
        let bytes = self.ask(expression, snaplen, link_type)?;
        let program =
            Program::from_bytes(&bytes, Trust::Operator).map_err(|error| match error {
                VerifyError::KernelOffset { .. } => FilterError::Refused(NO_DIRECTION.to_owned()),
                error => FilterError::BadProgram(error),
            })?;
        self.cache.keep(key, program.clone());
        Ok(program)
    }

    /// Asks the compiling process; starts one if there is none, or if it died between requests.
    fn ask(
        &mut self,
        expression: &str,
        snaplen: u32,
        link_type: u32,
    ) -> Result<Vec<u8>, FilterError> {
        let mut first_try = true;
        loop {
            let mut service = match self.service.take() {
                Some(service) => service,
                None => Service::start(&self.exe)?,
            };
            match service.ask(expression, snaplen, link_type) {
                Ok((code, bytes)) => {
                    // Kept after every answer: the process that parsed was a copy, and is gone.
                    self.service = Some(service);
                    return outcome(code, bytes);
                }
                // The service was dropped, which kills and reaps it.
                Err(error) if timed_out(&error) => return Err(FilterError::TooComplex),
                Err(_) if first_try => first_try = false,
                Err(error) => return Err(FilterError::Crashed(error.to_string())),
            }
        }
    }
}

fn outcome(code: u8, bytes: Vec<u8>) -> Result<Vec<u8>, FilterError> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    match code {
        status::PROGRAM => Ok(bytes),
        status::REFUSED => Err(FilterError::Refused(text(bytes))),
        status::TOO_COMPLEX => Err(FilterError::TooComplex),
        status::CRASHED => Err(FilterError::Crashed(text(bytes))),
        other => Err(FilterError::Crashed(format!(
            "the compiler answered {other}"
        ))),
    }
}

fn timed_out(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// The running process; dropping it kills it.
#[derive(Debug)]
struct Service {
    process: Child,
    stream: UnixStream,
}

impl Service {
    fn start(exe: &PathBuf) -> Result<Self, FilterError> {
        let (ours, theirs) = UnixStream::pair().map_err(FilterError::Start)?;
        let output = theirs.try_clone().map_err(FilterError::Start)?;
        let process = Command::new(exe)
            .arg0("vnplugd")
            .arg(COMPILE_FILTER_ARG)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(OwnedFd::from(output)))
            .stderr(Stdio::null())
            .spawn()
            .map_err(FilterError::Start)?;
        let mut service = Self {
            process,
            stream: ours,
        };
        match service.receive(Instant::now() + START_LIMIT) {
            Ok((status::READY, _)) => Ok(service),
            Ok((status::NO_LIBPCAP, why)) => Err(FilterError::NoLibpcap(
                String::from_utf8_lossy(&why).into_owned(),
            )),
            Ok((other, _)) => Err(FilterError::Crashed(format!(
                "the compiler began with {other}"
            ))),
            Err(error) => Err(FilterError::Start(error)),
        }
    }

    fn ask(&mut self, expression: &str, snaplen: u32, link_type: u32) -> io::Result<(u8, Vec<u8>)> {
        let deadline = Instant::now() + WALL_LIMIT;
        let len = u32::try_from(expression.len()).map_err(io::Error::other)?;
        let mut request = Vec::with_capacity(12 + expression.len());
        for word in [len, snaplen, link_type] {
            request.extend_from_slice(&word.to_le_bytes());
        }
        request.extend_from_slice(expression.as_bytes());
        self.stream.set_write_timeout(Some(WALL_LIMIT))?;
        self.stream.write_all(&request)?;
        self.receive(deadline)
    }

    fn receive(&mut self, deadline: Instant) -> io::Result<(u8, Vec<u8>)> {
        let mut head = [0_u8; 5];
        self.fill(&mut head, deadline)?;
        let [code, len @ ..] = head;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_REPLY_BYTES {
            return Err(io::Error::other(format!("reply of {len} bytes")));
        }
        let mut bytes = vec![0; len];
        self.fill(&mut bytes, deadline)?;
        Ok((code, bytes))
    }

    /// As `read_exact`, until `deadline` in all.
    fn fill(&mut self, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !buffer.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => buffer = &mut buffer[n..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Its copies die with it (parent-death signal). It may be dead already; and a daemon that
        // gave up its privileges may not kill another user's process: the end of its connection
        // ends it too.
        let _ = self.stream.shutdown(Shutdown::Both);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The latest programs, in two generations: when the younger one is full, the older is
/// forgotten. What is in use moves to the younger one, so it stays.
#[derive(Debug, Default)]
struct Cache {
    young: HashMap<Key, Program>,
    old: HashMap<Key, Program>,
    young_bytes: usize,
}

/// Expression, snaplen, link type.
type Key = (String, u32, u32);

impl Cache {
    fn find(&mut self, key: &Key) -> Option<Program> {
        if let Some(program) = self.young.get(key) {
            return Some(program.clone());
        }
        let program = self.old.remove(key)?;
        self.keep(key.clone(), program.clone());
        Some(program)
    }

    fn keep(&mut self, key: Key, program: Program) {
        // The decoded form is larger than the wire form; this counts both and some for the map.
        let cost = 256 + key.0.len() + 3 * INSTRUCTION_BYTES * program.instructions().len();
        if self.young_bytes + cost > CACHE_BYTES / 2 {
            self.old = std::mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        self.young_bytes += cost;
        self.young.insert(key, program);
    }
}

/// No program for this expression.
#[derive(Debug)]
pub enum FilterError {
    /// libpcap's own message, verbatim; it may quote the expression, so escape it before showing.
    Refused(String),
    /// Longer than [`MAX_EXPRESSION_BYTES`].
    TooLong {
        /// Bytes given.
        len_bytes: usize,
    },
    /// A NUL byte, which no expression has.
    Nul {
        /// Index of the byte.
        at: usize,
    },
    /// A limit was hit: time, memory or the length of the program.
    TooComplex,
    /// libpcap is not installed; the loader's words.
    NoLibpcap(String),
    /// The compiling process died of this expression; how.
    Crashed(String),
    /// libpcap made a program that does not pass verification.
    BadProgram(VerifyError),
    /// The compiling process did not start.
    Start(io::Error),
}

impl fmt::Display for FilterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(message) => f.write_str(message),
            Self::TooLong { len_bytes } => write!(
                f,
                "filter has {len_bytes} bytes, at most {MAX_EXPRESSION_BYTES} are allowed"
            ),
            Self::Nul { at } => write!(f, "filter has a NUL byte at {at}, remove it"),
            Self::TooComplex => write!(
                f,
                "filter takes more than {} ms, {} MiB or {} instructions to compile, simplify it",
                CPU_LIMIT.as_millis(),
                super::child::MEMORY_LIMIT_BYTES >> 20,
                vnplug_bpf::MAX_INSTRUCTIONS
            ),
            Self::NoLibpcap(why) => write!(
                f,
                "filters need libpcap on the host, install it (apt install libpcap0.8): {why}"
            ),
            Self::Crashed(how) => write!(f, "libpcap died of this filter ({how}), rewrite it"),
            Self::BadProgram(_) => f.write_str("libpcap made an unusable program of this filter"),
            Self::Start(_) => f.write_str("filter compiler does not start"),
        }
    }
}

impl std::error::Error for FilterError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::BadProgram(error) => Some(error),
            Self::Start(error) => Some(error),
            _ => None,
        }
    }
}

/// The first argument that makes `vnplugd` the compiling process.
pub const COMPILE_FILTER_ARG: &str = "--compile-filter";

/// The longest expression.
pub const MAX_EXPRESSION_BYTES: usize = 16 << 10;

/// Processor time for one expression.
///
/// libpcap's optimiser takes time that grows faster than the square of a list's length: 100 terms
/// `host a or host b …` take it 46 ms, 150 take 152 ms, 200 take 358 ms. Without optimising, 150
/// are already more than [`MAX_INSTRUCTIONS`](super::MAX_INSTRUCTIONS). Longer lists are for `net`.
pub const CPU_LIMIT: Duration = Duration::from_millis(250);

/// Time that one call of [`Compiler::compile`] may take, without the start of the process. What an
/// expression costs is limited by [`CPU_LIMIT`]: this is for a process that gets no processor, on a
/// machine that is busy, and must not refuse a filter for that.
pub const WALL_LIMIT: Duration = Duration::from_secs(5);

/// Time for the process to start and to load libpcap.
const START_LIMIT: Duration = Duration::from_secs(5);

/// Roughly how much the cache may hold.
const CACHE_BYTES: usize = 4 << 20;

/// For the offset that only the kernel can load, which libpcap makes of these two words.
const NO_DIRECTION: &str =
    "inbound/outbound not supported on a ring, whose frames have no direction";

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: usize) -> Key {
        (format!("tcp port {number}"), 96, 1)
    }

    #[test]
    fn the_cache_forgets_what_is_unused_and_stays_small() {
        let mut cache = Cache::default();
        cache.keep(key(0), Program::accept(1));
        for number in 1..50_000 {
            cache.keep(key(number), Program::accept(1));
            assert!(cache.find(&key(0)).is_some(), "in use, after {number}");
        }
        assert!(cache.find(&key(1)).is_none());
        assert!(cache.young.len() + cache.old.len() <= CACHE_BYTES / 256);
    }

    #[test]
    fn every_error_says_what_to_do_or_quotes_libpcap() {
        let cases: &[(FilterError, &str)] = &[
            (
                FilterError::Refused("syntax error".to_owned()),
                "syntax error",
            ),
            (FilterError::TooLong { len_bytes: 20_000 }, "at most 16384"),
            (FilterError::Nul { at: 3 }, "remove it"),
            (FilterError::TooComplex, "simplify it"),
            (
                FilterError::NoLibpcap("no file".to_owned()),
                "apt install libpcap0.8",
            ),
            (FilterError::Crashed("signal 11".to_owned()), "signal 11"),
            (FilterError::BadProgram(VerifyError::Empty), "unusable"),
            (
                FilterError::Start(io::ErrorKind::NotFound.into()),
                "does not start",
            ),
        ];
        for (error, text) in cases {
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_reply_of_unknown_kind_is_not_trusted() {
        assert!(matches!(
            outcome(9, Vec::new()),
            Err(FilterError::Crashed(_))
        ));
        assert!(matches!(
            outcome(status::TOO_COMPLEX, Vec::new()),
            Err(FilterError::TooComplex)
        ));
        assert_eq!(outcome(status::PROGRAM, vec![1]).unwrap(), [1]);
    }
}
