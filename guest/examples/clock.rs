//! The clock of `docs/backends.md` in Rust: a back-end that says what time it is, and shares a page with it.
//!
//! ```text
//! clock 90 clock
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use vnplug::{BackEnd, BackEndOptions, Error, Heard};

/// The event: a second is over.
const SECOND: u8 = 0;

fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let number = words.next().and_then(|word| word.parse().ok());
    let name = words.next().unwrap_or_else(|| "clock".into());
    let options = BackEndOptions::new(number.unwrap_or(90), &name);
    let mut clock = options.events(0, 1).register()?;
    println!("registered");
    // The page of each program, by its channel.
    let mut pages = BTreeMap::new();
    let mut told = 0;
    loop {
        if let Some(heard) = clock.next(Some(Duration::from_millis(100)))? {
            hear(&mut clock, &mut pages, heard)?;
        }
        let now = seconds();
        if now != told {
            told = now;
            for (&channel, &region) in &pages {
                write_page(&clock, region)?;
                unless_over(clock.event(channel, SECOND, 1))?;
            }
        }
    }
}

fn hear(clock: &mut BackEnd, pages: &mut BTreeMap<u32, u32>, heard: Heard) -> Result<(), Error> {
    match heard {
        Heard::Joined { channel, .. } => match clock.share(channel, 16, false) {
            Ok(region) => {
                pages.insert(channel, region);
                write_page(clock, region)
            }
            Err(refused) => unless_over(clock.hang_up(channel, &refused.to_string())),
        },
        // A stranger's bytes; "time" is all that we understand.
        Heard::Message { channel, bytes } => {
            let answer = match &bytes[..] {
                b"time" => time(seconds()),
                _ => "what?".to_owned(),
            };
            unless_over(clock.send(channel, answer.as_bytes()))
        }
        Heard::Left { channel, .. } => {
            pages.remove(&channel);
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The page: a sequence, odd while we write, then the time. All by atomics: a program may read meanwhile.
fn write_page(clock: &BackEnd, region: u32) -> Result<(), Error> {
    let Some(page) = clock.memory(region) else {
        return Ok(());
    };
    let sequence = page.load(0)?;
    page.store(0, sequence + 1)?;
    page.store(8, seconds())?;
    page.store(0, sequence + 2)
}

/// A program may be gone, which `next` tells; or it asks and does not listen, and that is its loss.
fn unless_over(said: Result<(), Error>) -> Result<(), Error> {
    match said {
        Err(Error::Invalid(_) | Error::Disconnected | Error::Full) => Ok(()),
        said => said,
    }
}

fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// As UTC.
fn time(seconds: u64) -> String {
    let (hours, minutes) = (seconds / 3600 % 24, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}", seconds % 60)
}
