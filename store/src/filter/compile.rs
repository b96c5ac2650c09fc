//! From an expression to a program: by libpcap, or by `tcpdump -ddd` where it cannot be loaded (in a
//! statically linked `vnplug`).

use std::ffi::CString;
use std::io::Write;
use std::process::{Command, Stdio};

use vnplug_bpf::libpcap::Library;
use vnplug_bpf::{Instruction, Program, Trust, VerifyError};

use super::FilterError;

/// Compiles an expression for frames of this link type.
pub(super) fn compile(expression: &str, link_type: u32) -> Result<Program, FilterError> {
    if expression.trim().is_empty() {
        return Ok(Program::accept(u32::MAX));
    }
    let list = match by_libpcap(expression, link_type) {
        Err(FilterError::NoCompiler(why)) => {
            by_tcpdump(expression, link_type).map_err(|error| match error {
                FilterError::NoCompiler(other) => {
                    FilterError::NoCompiler(format!("{why}; {other}"))
                }
                error => error,
            })?
        }
        other => other?,
    };
    Program::from_instructions(&list, Trust::Own).map_err(|error| {
        FilterError::Expression(match error {
            VerifyError::KernelOffset { .. } => {
                "it asks for what a file does not have (inbound, outbound)".to_owned()
            }
            error => error.to_string(),
        })
    })
}

/// Has libpcap compile it, with the rights of the user whose expression it is.
pub(super) fn by_libpcap(
    expression: &str,
    link_type: u32,
) -> Result<Vec<Instruction>, FilterError> {
    let nul = |_| FilterError::Expression("the expression has a NUL in it".to_owned());
    let expression = CString::new(expression).map_err(nul)?;
    // libpcap's own numbers are those of files, but for this one of Linux.
    let link_type = match link_type {
        101 => DLT_RAW,
        other => other,
    };
    Library::load()
        .map_err(FilterError::NoCompiler)?
        .compile(&expression, SNAPLEN, link_type)
        .map_err(FilterError::Expression)
}

/// Has tcpdump read an empty capture file of that link type.
pub(super) fn by_tcpdump(
    expression: &str,
    link_type: u32,
) -> Result<Vec<Instruction>, FilterError> {
    let missing = |error| FilterError::NoCompiler(format!("tcpdump: {error}"));
    let mut child = Command::new("tcpdump")
        .args(["-r", "-", "-ddd", "--", expression])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(missing)?;
    let mut header = Vec::with_capacity(24);
    for word in [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 262_144, link_type] {
        header.extend(word.to_le_bytes());
    }
    if let Some(mut stdin) = child.stdin.take() {
        // If it refuses to read, it says why.
        let _ = stdin.write_all(&header);
    }
    let output = child.wait_with_output().map_err(missing)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let list: Option<Vec<Instruction>> = text.lines().skip(1).map(instruction).collect();
    match list {
        Some(list) if output.status.success() && !list.is_empty() => Ok(list),
        _ => {
            let words = String::from_utf8_lossy(&output.stderr);
            let last = words.lines().last().unwrap_or("tcpdump said nothing");
            Err(FilterError::Expression(
                last.trim_start_matches("tcpdump: ").to_owned(),
            ))
        }
    }
}

/// A line of `tcpdump -ddd`: code, jt, jf, k.
fn instruction(line: &str) -> Option<Instruction> {
    let mut words = line.split_ascii_whitespace();
    Some(Instruction {
        code: words.next()?.parse().ok()?,
        jt: words.next()?.parse().ok()?,
        jf: words.next()?.parse().ok()?,
        k: words.next()?.parse().ok()?,
    })
}

/// Frames that begin with an IP header.
const DLT_RAW: u32 = 12;

/// What a program accepts of a packet: more than any has.
const SNAPLEN: u32 = 262_144;
