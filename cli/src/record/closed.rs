//! `vnplug record --compress … --encrypt-to …`: what is done with closed files.

use std::path::PathBuf;

use clap::Args;
use vnplug_store::archive::{How, Recipients};
use vnplug_store::record::{Settings, Status};

use crate::failure::Failure;
use crate::text::grouped;

/// Options for closed files.
#[derive(Debug, Args)]
#[command(next_help_heading = "Closed files")]
pub(super) struct ClosedOptions {
    /// Compress files when they are closed: zstd, or zstd:LEVEL from 1 to 19
    #[arg(long, value_name = "METHOD", value_parser = level)]
    compress: Option<i32>,
    /// Encrypt files when they are closed, to this public key of age (age1…); several can be given, each
    /// of whom can read them
    #[arg(long, value_name = "KEY")]
    encrypt_to: Vec<String>,
    /// The same, to each key in a file
    #[arg(long, value_name = "FILE")]
    encrypt_to_file: Vec<PathBuf>,
}

impl ClosedOptions {
    pub(super) fn archive(&self, settings: &mut Settings) -> Result<(), Failure> {
        let recipients = Recipients::new(&self.encrypt_to, &self.encrypt_to_file)
            .map_err(|what| Failure::about("encryption", what))?;
        if self.compress.is_some() || !recipients.is_empty() {
            settings.archive = Some(How {
                level: self.compress,
                recipients,
            });
        }
        Ok(())
    }
}

/// What became of closed files, if anything is done with them.
pub(super) fn told(status: &Status) -> String {
    let Some(archive) = &status.archive else {
        return String::new();
    };
    let part = |count: u64, words: &str| match count {
        0 => String::new(),
        _ => format!(", {} {words}", grouped(count)),
    };
    let saved = match archive.bytes_before {
        0 => String::new(),
        before => format!(
            " to {:.0} %",
            100.0 * archive.bytes_after as f64 / before as f64
        ),
    };
    let trouble = match archive.trouble.as_str() {
        "" => String::new(),
        trouble => format!(", TROUBLE: {trouble}"),
    };
    format!(
        "; {} files packed{saved}{}{}{}{trouble}",
        grouped(archive.segments),
        part(archive.waiting, "wait"),
        part(archive.left, "left as they are: compression is too slow"),
        part(archive.hurried, "encrypted only: compression is too slow"),
    )
}

fn level(text: &str) -> Result<i32, String> {
    let wrong = || format!("`{text}`: write zstd or zstd:LEVEL, from 1 to 19");
    match text.split_once(':') {
        None if text == "zstd" => Ok(3),
        Some(("zstd", level)) => match level.parse() {
            Ok(level @ 1..=19) => Ok(level),
            _ => Err(wrong()),
        },
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::level;

    #[test]
    fn a_method_is_zstd_with_or_without_a_level() {
        assert_eq!(level("zstd"), Ok(3));
        assert_eq!(level("zstd:19"), Ok(19));
        for text in ["", "gzip", "zstd:", "zstd:0", "zstd:20", "zstd:x", "lz4:3"] {
            assert!(level(text).is_err(), "{text}");
        }
    }
}
