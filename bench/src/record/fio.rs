//! What the disk takes: fio with O_DIRECT and io_uring.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::row::Result;

/// Ways to write, bytes at once and writes under way: what a disk likes best differs.
const SHAPES: [Shape; 2] = [Shape("4M", "4", "native"), Shape("1M", "16", "native")];
/// As the recorder writes: each write makes the file longer, so that whoever reads it finds no zeros.
const APPENDING: Shape = Shape("16M", "1", "keep");

/// Bytes at once, writes under way, and how the file's blocks are reserved.
#[derive(Clone, Copy)]
struct Shape(&'static str, &'static str, &'static str);

/// Bytes per second of one file of so many bytes, written by one process in the better of two ways.
pub(super) fn bytes_per_second(dir: &Path, bytes: u64) -> Result<f64> {
    let mut best = 0.0_f64;
    for shape in SHAPES {
        best = best.max(once(dir, bytes, shape)?);
    }
    Ok(best)
}

/// The same of a file to which one write after the other is appended.
pub(super) fn appending(dir: &Path, bytes: u64) -> Result<f64> {
    once(dir, bytes, APPENDING)
}

fn once(dir: &Path, bytes: u64, Shape(block, depth, reserve): Shape) -> Result<f64> {
    let file = dir.join("fio");
    let output = Command::new("fio")
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
