//! From an expression to a program: by libpcap, or by `tcpdump -ddd` where it cannot be loaded (in a
//! statically linked `vnplug`).

use std::io::Write;
use std::process::{Command, Stdio};

use super::FilterError;
#[cfg(not(target_feature = "crt-static"))]
use super::libpcap::compile as by_libpcap;
use super::program::{Instruction, Program};

/// Compiles an expression for frames of this link type.
pub(super) fn compile(expression: &str, link_type: u32) -> Result<Program, FilterError> {
    if expression.trim().is_empty() {
        return Ok(Program::everything());
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
    Program::new(list).map_err(|why| FilterError::Expression(why.to_owned()))
}

#[cfg(target_feature = "crt-static")]
fn by_libpcap(_: &str, _: u32) -> Result<Vec<Instruction>, FilterError> {
    let why = "a statically linked program loads no libraries";
    Err(FilterError::NoCompiler(why.to_owned()))
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
