//! Sends witness frames on an interface and says how many the kernel took.
//!
//!     wiregen --interface wire0 --count 1000000 [--size 60] [--pps 0] [--run 1] [--flows 1]
//!
//! `--pps 0` is flat out. Prints `sent N frames in S s: R frames/s, T retries`. Ends with 0 when all
//! were sent, 1 when the kernel refused, 2 on a wrong command line.

use std::num::NonZeroU64;
use std::process::ExitCode;
use std::str::FromStr;

use vnplug_e2e::traffic::Stream;

fn main() -> ExitCode {
    let stream = match parse(std::env::args().skip(1)) {
        Ok(stream) => stream,
        Err(error) => {
            eprintln!("wiregen: {error}\nusage: {USAGE}");
            return ExitCode::from(2);
        }
    };
    match stream.send() {
        Ok(sent) => {
            println!(
                "sent {} frames in {:.3} s: {:.0} frames/s, {} retries",
                sent.frames,
                sent.elapsed.as_secs_f64(),
                sent.pps(),
                sent.retries
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            let cause = std::error::Error::source(&error)
                .map(|source| format!(": {source}"))
                .unwrap_or_default();
            eprintln!("wiregen: {error}{cause}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Result<Stream, String> {
    let mut stream = Stream::new("", 0);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--interface" => stream.interface = value,
            "--count" => stream.count = number(&flag, &value)?,
            "--size" => stream.len_bytes = number(&flag, &value)?,
            "--pps" => stream.pps = NonZeroU64::new(number(&flag, &value)?),
            "--run" => stream.run = number(&flag, &value)?,
            "--flows" => stream.flows = number(&flag, &value)?,
            _ => return Err(format!("unknown argument {flag}")),
        }
    }
    if stream.interface.is_empty() || stream.count == 0 {
        return Err("--interface and --count are needed".to_owned());
    }
    Ok(stream)
}

fn number<T: FromStr>(flag: &str, value: &str) -> Result<T, String> {
    value
        .parse()
        .map_err(|_| format!("{flag} {value} is not a number that fits"))
}

const USAGE: &str =
    "wiregen --interface NAME --count FRAMES [--size BYTES] [--pps RATE|0] [--run ID] [--flows N]";
