//! `vnplug extract` and `vnplug index`: packets of recordings, found again.

mod summary;
mod target;
mod words;

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use vnplug_store::archive::Keys;
use vnplug_store::extract::{
    Extract as Search, Format as FileFormat, Output, Query, Step, Tally, captures, forbidden,
    parse_time,
};
use vnplug_store::index::{damage, rebuild};
use vnplug_store::manifest::holes;

use crate::failure::{Failure, OK, Outcome, USAGE};
use crate::text::{counted, grouped};
use crate::{out, sys};

use target::Target;
use words::are_there;

/// Extracts packets from recordings, in the order of time.
#[derive(Debug, Args)]
#[command(after_help = "\
Times: 2026-11-21T13:45:01.5Z (UTC unless a zone is given), seconds since 1970, now, or -10m.

Examples:
  vnplug extract --from -10m /data1 /data2 'host 10.1.2.3 and port 443' -w found.pcapng
  vnplug extract --from 2026-11-21T13:00 --to 2026-11-21T14:00 /data 'vlan 7' | tcpdump -nr -")]
pub(crate) struct Extract {
    /// Recordings' directories or capture files; the last word may be a filter (pcap-filter)
    #[arg(required = true, value_name = "DIR|FILTER")]
    places: Vec<PathBuf>,
    /// Packets from this time on
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    from: Option<u64>,
    /// Packets before this time
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    to: Option<u64>,
    /// File to write; `-` is standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    write: PathBuf,
    /// Format [default: pcap for a FILE that ends in .pcap, else pcapng]
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// File with an age identity (secret key) for encrypted recordings; may be repeated
    #[arg(short, long, value_name = "FILE")]
    identity: Vec<PathBuf>,
    /// Only packets that match this expression; then all other words are directories or files
    #[arg(short, long, value_name = "EXPRESSION")]
    filter: Option<String>,
    /// Print on stderr what was read, also if the packets go to standard output
    #[arg(short, long)]
    verbose: bool,
    /// With -w FILE: one JSON object on standard output says what was found, lost and wrong
    #[arg(long)]
    json: bool,
}

/// Which kind of file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Classic, with nanoseconds
    Pcap,
    /// With interfaces and flags
    Pcapng,
}

impl Extract {
    pub(crate) fn run(&self) -> Outcome {
        let to_stdout = self.write.as_os_str() == "-";
        if to_stdout && out::is_terminal() {
            return Err(Failure::new(
                "packets are not written to a terminal; add `-w FILE` or `| tcpdump -nr -`",
            ));
        }
        if to_stdout && self.json {
            return Err(Failure::with_code(
                USAGE,
                "--json: the packets go to standard output; add `-w FILE`",
            ));
        }
        let (from_ns, to_ns) = range(self.from, self.to)?;
        let (places, filter) = words::split(&self.places, self.filter.as_deref())?;
        let query = Query {
            from_ns,
            to_ns,
            filter,
        };
        let mut wrong = Wrong::default();
        wrong.places(places)?;
        let mut search = Search::open_with(places, query, &keys(&self.identity)?)?;
        wrong.search(&mut search);
        let to = match to_stdout {
            true => To::Stdout(io::stdout()),
            false => {
                let file = create(&self.write, places)?;
                // From now on there is something to take away.
                sys::catch_signals();
                To::File(file)
            }
        };
        let written = write(&mut search, Output::new(to, self.format()));
        let bytes = written.map_err(|error| match (error, to_stdout) {
            (Stopped::Write(error), true) if error.kind() == ErrorKind::BrokenPipe => {
                Failure::quiet()
            }
            (Stopped::Write(error), _) => Failure::about(self.write.display(), error),
            (Stopped::Search(failure), _) => failure,
            (Stopped::Signal, _) => {
                Failure::about(self.write.display(), "stopped by a signal, not written")
            }
        })?;
        wrong.search(&mut search);
        tell_losses(&search);
        let tally = search.tally();
        if self.verbose || tally.late > 0 || tally.packets == 0 || !to_stdout {
            self.close(tally, bytes, to_stdout);
        }
        if self.json {
            out::line(&summary::json(&self.write, &search, bytes, &wrong.told).to_string())?;
        }
        wrong.end("found")
    }

    /// The last line.
    fn close(&self, tally: Tally, bytes: u64, to_stdout: bool) {
        let packets = match tally.packets {
            0 => "no packets match".to_owned(),
            packets => counted(packets, "packet"),
        };
        let late = match tally.late {
            0 => String::new(),
            late => format!(", {} of them out of order", grouped(late)),
        };
        let file = match to_stdout {
            true => String::new(),
            false => format!(
                ", {} in {}",
                counted(bytes, "captured byte"),
                self.write.display()
            ),
        };
        out::note(&format!(
            "{packets}{late}{file}; {}, {} read, {} left out",
            counted(tally.segments, "segment"),
            counted(tally.bytes_read, "byte"),
            counted(tally.chunks_skipped, "chunk"),
        ));
    }

    fn format(&self) -> FileFormat {
        match self.format {
            Some(Format::Pcap) => FileFormat::Pcap,
            Some(Format::Pcapng) => FileFormat::Pcapng,
            None if self.write.extension().is_some_and(|ext| ext == "pcap") => FileFormat::Pcap,
            None => FileFormat::Pcapng,
        }
    }
}

/// Where packets go.
enum To {
    Stdout(io::Stdout),
    File(Target),
}

impl Write for To {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Stdout(to) => to.write(bytes),
            Self::File(to) => to.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Stdout(to) => to.flush(),
            Self::File(to) => to.flush(),
        }
    }
}

/// Why not all was written.
enum Stopped {
    Write(io::Error),
    Search(Failure),
    Signal,
}

impl From<io::Error> for Stopped {
    fn from(error: io::Error) -> Self {
        Self::Write(error)
    }
}

/// Writes what is found, and what is missing: the captured bytes.
fn write(search: &mut Search, mut output: Output<To>) -> Result<u64, Stopped> {
    let mut progress = out::Progress::new(false);
    let mut bytes = 0;
    loop {
        match search
            .step()
            .map_err(|error| Stopped::Search(error.into()))?
        {
            Step::Packet(packet) => {
                bytes += packet.bytes.len() as u64;
                output.write(&packet)?;
            }
            Step::Looking => {
                if sys::stop().is_some() {
                    return Err(Stopped::Signal);
                }
            }
            Step::End => break,
        }
        let tally = search.tally();
        progress.tell(|| far(tally));
    }
    output.tell(search.losses())?;
    if let To::File(file) = output.finish()? {
        file.finish()?;
    }
    Ok(bytes)
}

/// How far a search is.
pub(crate) fn far(tally: Tally) -> String {
    format!(
        "{} found, {:.1} MB read",
        counted(tally.packets, "packet"),
        tally.bytes_read as f64 / 1e6
    )
}

/// Makes the file that is written; not one of those that are read.
fn create(path: &Path, places: &[PathBuf]) -> Result<Target, Failure> {
    match forbidden(path, places) {
        Some(why) => Err(Failure::about(path.display(), why)),
        None => Target::create(path).map_err(|error| Failure::about(path.display(), error)),
    }
}

/// Says what the range lost.
pub(crate) fn tell_losses(search: &Search) {
    for words in search.losses().words() {
        out::note(&words);
    }
}

/// The keys that open encrypted recordings.
pub(crate) fn keys(files: &[PathBuf]) -> Result<Keys, Failure> {
    Keys::read(files).map_err(|what| Failure::about("--identity", what))
}

/// What was told to be wrong with recordings.
#[derive(Debug, Default)]
pub(crate) struct Wrong {
    damaged: bool,
    unread: bool,
    /// What was said.
    pub(crate) told: Vec<String>,
}

impl Wrong {
    /// Tells directories that have nothing to read. A recording that has no packets yet is one without
    /// packets.
    ///
    /// # Errors
    /// [`Failure`] if no place has.
    pub(crate) fn places(&mut self, places: &[PathBuf]) -> Result<(), Failure> {
        are_there(places)?;
        let is_empty = |place: &&PathBuf| {
            let (files, unread) = captures(std::slice::from_ref(*place));
            files.is_empty() && unread.is_empty()
        };
        let (begun, empty): (Vec<&PathBuf>, Vec<&PathBuf>) = places
            .iter()
            .filter(is_empty)
            .partition(|dir| has_state(dir));
        for dir in &begun {
            out::note(&format!("no packets yet in {}", dir.display()));
        }
        if empty.len() == places.len() {
            let names: Vec<String> = empty.iter().map(|dir| dir.display().to_string()).collect();
            return Err(Failure::new(format!("no segments in {}", names.join(", "))));
        }
        for dir in &empty {
            out::note(&format!("no segments in {}", dir.display()));
        }
        self.unread |= !empty.is_empty();
        Ok(())
    }

    /// Tells what is damaged, and what could not be read.
    pub(crate) fn search(&mut self, search: &mut Search) {
        for problem in search.problems() {
            let text = problem.to_string();
            out::note(&text);
            self.told.push(text);
            match problem.is_damage() {
                true => self.damaged = true,
                false => self.unread = true,
            }
        }
    }

    /// How the command ends; `done` is what was done with the rest.
    pub(crate) fn end(&self, done: &str) -> Outcome {
        let what = match (self.damaged, self.unread) {
            (false, false) => return Ok(OK),
            (true, false) => "the recording is damaged where it was told",
            (false, true) => "what was told could not be read",
            (true, true) => "what was told is damaged, or could not be read",
        };
        Err(Failure::new(format!("{what}; all else was {done}")))
    }
}

/// Whether a recorder has begun here.
fn has_state(dir: &Path) -> bool {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.path());
    names.any(|path| path.extension().is_some_and(|ext| ext == "state"))
}

/// Makes the indexes of capture files (.vnx) that are missing, torn, or of other files.
#[derive(Debug, Args)]
#[command(after_help = "\
Files that were written to in the last 10 seconds are left alone.

Example: vnplug index /data1 old.pcap")]
pub(crate) struct Index {
    /// Recordings' directories or capture files
    #[arg(required = true, value_name = "DIR")]
    places: Vec<PathBuf>,
}

impl Index {
    pub(crate) fn run(&self) -> Outcome {
        let mut wrong = Wrong::default();
        wrong.places(&self.places)?;
        let mut failed = wrong.unread;
        for hole in holes(&self.places)? {
            failed = true;
            out::note(&hole.to_string());
        }
        for found in vnplug_store::extract::find(&self.places)? {
            let written = fs::metadata(&found.path).and_then(|about| about.modified());
            let age = written.map(|at| at.elapsed().unwrap_or(Duration::ZERO));
            let closed = found.trailer.or(found.longer);
            if closed.is_none() && age.is_ok_and(|age| age < BUSY) {
                out::note(&format!("{}: is being written", found.path.display()));
                continue;
            }
            // The index of one that was cut off stays: it is what tells that something is missing.
            let problem = match found.problem().map_or_else(|| rebuild(&found.path), Err) {
                Ok(made) => {
                    if made {
                        out::line(&format!("{}: made", found.path.display()))?;
                    }
                    damage(&found.path)
                }
                Err(error) => Some(error),
            };
            if let Some(problem) = problem {
                failed = true;
                out::note(&problem.to_string());
            }
        }
        match failed {
            true => Err(Failure::new(
                "what was told is missing or damaged; all else has its index",
            )),
            false => Ok(OK),
        }
    }
}

/// A range of time on the command line: from the first on, and before the second.
pub(crate) fn range(from: Option<u64>, to: Option<u64>) -> Result<(u64, u64), Failure> {
    let range = (from.unwrap_or(0), to.unwrap_or(u64::MAX));
    match range.0 <= range.1 {
        true => Ok(range),
        false => Err(Failure::with_code(
            USAGE,
            "--from is later than --to: nothing is between them",
        )),
    }
}

/// A time on the command line.
pub(crate) fn time(text: &str) -> Result<u64, vnplug_store::extract::BadTime> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    parse_time(text, now.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// A file that was written to so recently may be at work.
const BUSY: Duration = Duration::from_secs(10);
