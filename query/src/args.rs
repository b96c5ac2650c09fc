//! The command line.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use vnplug_ring::units;
use vnplug_store::extract::{BadTime, parse_time};

use crate::catalog::Scope;
use crate::engine::Limits;
use crate::failure::Failure;
use crate::output::Format;

/// SQL over who spoke with whom in recordings
#[derive(Debug, Parser)]
#[command(
    name = "vnplug query",
    bin_name = "vnplug query",
    version,
    max_term_width = 100,
    after_help = "\
Tables: flows (a row for each flow and minute), segments, losses; `DESCRIBE flows` lists the columns.
Times: 2026-11-21T13:45:01.5Z (UTC unless a zone is given), seconds since 1970, now, or -10m.

Examples:
  vnplug query 'select src, dst, sum(bytes) b from flows group by 1, 2 order by b desc limit 10' /data
  vnplug query \"select minute, dst_port, sum(bytes) from flows where in_net(src, '10.0.0.0/8')
                group by 1, 2 order by 1\" --from -1h /data --format csv
  vnplug query --prepare --follow /data

Exit codes: 0 done, 1 an error or damage, told on stderr, 2 wrong usage, 130 interrupted."
)]
pub struct Arguments {
    /// A query in SQL (not with --prepare), and recordings' directories or capture files
    #[arg(required = true, value_name = "SQL|DIR")]
    words: Vec<PathBuf>,
    /// Rows that reach beyond this time
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    from: Option<u64>,
    /// Rows that begin before this time
    #[arg(long, value_name = "TIME", value_parser = time, allow_hyphen_values = true)]
    to: Option<u64>,
    /// Format of the answer [default: by the name of FILE, else table]
    #[arg(long, value_enum)]
    pub(crate) format: Option<Format>,
    /// Write the answer to a file
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Memory for the query; beyond it sorts and groups go to the disk
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = size)]
    memory: u64,
    /// Directory for what does not fit into memory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    spill: PathBuf,
    /// Most bytes there
    #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = size)]
    spill_limit: u64,
    /// Threads [default: one for each CPU, at most 8]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write nothing beside segments
    #[arg(long, conflicts_with = "prepare")]
    pub(crate) no_files: bool,
    /// Make the files beside closed segments that later queries read, and answer nothing
    #[arg(long, conflicts_with_all = ["format", "output"])]
    pub(crate) prepare: bool,
    /// Go on with it as segments are closed
    #[arg(long, requires = "prepare")]
    pub(crate) follow: bool,
}

impl Arguments {
    /// The query; `None` with `--prepare`.
    ///
    /// # Errors
    /// [`Failure`] if there is none, or no place.
    pub(crate) fn sql(&self) -> Result<Option<&str>, Failure> {
        if self.prepare {
            return Ok(None);
        }
        let [sql, _, ..] = &self.words[..] else {
            return Err(Failure::new(
                "say a query in SQL and then where the recordings are: vnplug query 'select …' DIR",
            ));
        };
        let sql = sql.to_str().filter(|sql| !sql.trim().is_empty());
        sql.map(Some)
            .ok_or_else(|| Failure::new("the query is empty, or not UTF-8"))
    }

    /// Whether nothing can be in the time that is asked for.
    pub(crate) fn is_backwards(&self) -> bool {
        self.from.zip(self.to).is_some_and(|(from, to)| from > to)
    }

    /// What is looked at.
    pub(crate) fn scope(&self) -> Scope {
        let skip = usize::from(!self.prepare);
        Scope {
            places: self.words[skip..].to_vec(),
            from_ns: self.from.unwrap_or(0),
            to_ns: self.to.unwrap_or(u64::MAX),
            jobs: self.threads(),
            memory_bytes: usize::try_from(self.memory).unwrap_or(usize::MAX),
        }
    }

    /// What the query may take.
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            memory_bytes: usize::try_from(self.memory).unwrap_or(usize::MAX),
            spill: self.spill.clone(),
            spill_bytes: self.spill_limit,
            threads: self.threads(),
        }
    }

    fn threads(&self) -> usize {
        let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or_else(|| cpus().min(8)).max(1)
    }

    /// The format of the answer.
    ///
    /// # Errors
    /// [`Failure`] if it would be Parquet on standard output.
    pub(crate) fn answer_format(&self) -> Result<Format, Failure> {
        let by_name = self.output.as_deref().and_then(Format::of);
        let format = self.format.or(by_name).unwrap_or(Format::Table);
        match (format, &self.output) {
            (Format::Parquet, None) => Err(Failure::new("Parquet needs a file: add `-o FILE`")),
            _ => Ok(format),
        }
    }
}

fn time(text: &str) -> Result<u64, BadTime> {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    parse_time(text, now.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// A size above 0.
fn size(text: &str) -> Result<u64, String> {
    match units::size(text)? {
        0 => Err("more than 0 bytes are needed".to_owned()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use vnplug_testing::Pages;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn every_option_stands_in_a_page() {
        let command = Arguments::command();
        let options = command.get_arguments().filter_map(|it| it.get_long());
        let lacking = Pages::read().lack("vnplug query", options);
        assert!(lacking.is_empty(), "docs/ lacks {lacking:#?}");
    }

    #[test]
    fn the_first_word_is_the_query_unless_files_are_prepared() {
        let of = |words: &[&str]| Arguments::parse_from([&["query"], words].concat());
        let query = of(&["select 1", "/a", "/b", "--from", "-10m"]);
        assert_eq!(query.sql().unwrap(), Some("select 1"));
        assert_eq!(query.scope().places, [PathBuf::from("/a"), "/b".into()]);
        let prepare = of(&["--prepare", "/a"]);
        assert_eq!(prepare.sql().unwrap(), None);
        assert_eq!(prepare.scope().places, [PathBuf::from("/a")]);
        assert!(of(&["select 1"]).sql().is_err());
        assert!(of(&[" ", "/a"]).sql().is_err());
    }

    #[test]
    fn sizes_are_read() {
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("2GiB"), Ok(2 << 30));
        assert_eq!(size("100"), Ok(100));
        for wrong in ["", "M", "0", "1x", "-1", "99999999999T"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
