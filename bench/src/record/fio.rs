//! What the disk takes: fio with O_DIRECT and io_uring.
//!
//! A virtual disk that takes some 250 pieces of memory at once gets larger requests from huge pages; fio
//! asks for none by itself, the recorder does. So fio is measured both ways.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::row::{Result, Samples};

/// Ways to write, bytes at once and writes under way: what a disk likes best differs.
const SHAPES: [Shape; 2] = [Shape("4M", "4", "native"), Shape("1M", "16", "native")];
/// As the recorder writes: each write makes the file longer, so that its readers find no zeros.
const APPENDING: Shape = Shape("16M", "1", "keep");

/// Bytes at once, writes under way, and how the file's blocks are reserved.
#[derive(Clone, Copy)]
struct Shape(&'static str, &'static str, &'static str);

/// What the memory is like that fio writes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pages {
    /// As it comes with fio.
    Small,
    /// Huge pages, which the C library asks for.
    Huge,
}

/// A disk's rate, in megabytes per second, in several ways.
#[derive(Default)]
pub(super) struct Limit([Samples; SHAPES.len()]);

impl Limit {
    /// Measures once more; one file of this many bytes each, written by one process.
    pub(super) fn measure(&mut self, dir: &Path, bytes: u64, pages: Pages) -> Result<()> {
        for (shape, samples) in SHAPES.iter().zip(&mut self.0) {
            samples.push(once(dir, bytes, *shape, pages)? / 1e6);
        }
        Ok(())
    }

    /// Of the way that is best on the whole. The best of each time would be a limit that no way reaches on
    /// a disk that is now slower, now faster.
    pub(super) fn best(&self) -> &Samples {
        let [one, other] = &self.0;
        match one.median() >= other.median() {
            true => one,
            false => other,
        }
    }
}

/// The rate of a file to which one write after the other is appended.
pub(super) fn appending(dir: &Path, bytes: u64, pages: Pages) -> Result<f64> {
    Ok(once(dir, bytes, APPENDING, pages)? / 1e6)
}

/// Bytes per second.
fn once(dir: &Path, bytes: u64, Shape(block, depth, reserve): Shape, pages: Pages) -> Result<f64> {
    let file = dir.join("fio");
    let mut command = Command::new("fio");
    if pages == Pages::Huge {
        // glibc 2.35 and later.
        command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    }
    let output = command
        .args(["--name=limit", "--rw=write", "--direct=1"])
        .args(["--ioengine=io_uring", "--end_fsync=1"])
        .arg(format!("--fallocate={reserve}"))
        .args([format!("--bs={block}"), format!("--iodepth={depth}")])
        .arg(format!("--size={}", bytes.next_multiple_of(16 << 20)))
        .arg(format!("--filename={}", file.display()))
        .args(["--output-format=json", "--allow_file_create=1"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("fio: {error}; it is a Debian package"))?;
    // It may not have come to make it.
    let _ = std::fs::remove_file(&file);
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("fio: {}{}", text.trim(), errors.trim()).into());
    }
    rate(&text).ok_or_else(|| format!("fio said {text:?}").into())
}

/// What its report says; there may be notes before it.
fn rate(report: &str) -> Option<f64> {
    let report: Value = serde_json::from_str(report.get(report.find('{')?..)?).ok()?;
    let write = &report["jobs"][0]["write"];
    // With the time of the last sync, which `bw_bytes` leaves out.
    let (bytes, ms) = (
        write["io_bytes"].as_f64()?,
        report["jobs"][0]["job_runtime"].as_f64()?,
    );
    (ms > 0.0).then(|| bytes * 1000.0 / ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_bytes_by_time() {
        let report = "note: x\n{\"jobs\":[{\"job_runtime\":500,\"write\":{\"io_bytes\":1000}}]}";
        assert_eq!(rate(report), Some(2000.0));
        assert_eq!(rate("none"), None);
    }
}
