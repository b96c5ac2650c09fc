//! A program that writes what a back-end lets it write: a text, at the begin of all memory that is shared with it, and again
//! at every event. It lets go of nothing, as a careless program does.
//!
//! ```text
//! pen kv 'some text'
//! ```

use vnplug::{ChannelOptions, Error, SharedMemory, Told};

fn main() -> Result<(), Error> {
    let mut words = std::env::args().skip(1);
    let name = words.next().unwrap_or_else(|| "kv".into());
    let text = words.next().unwrap_or_else(|| "hello".into());
    let mut channel = ChannelOptions::new(&name).open()?;
    let write = |region: u32, memory: Option<&SharedMemory>| {
        let Some(memory) = memory else {
            return;
        };
        let len = text.len().min(memory.len() as usize);
        match memory.write(0, &text.as_bytes()[..len]) {
            Ok(()) => println!("memory {region}: written"),
            Err(error) => println!("memory {region}: refused: {error}"),
        }
    };
    loop {
        match channel.next(None)? {
            Some(Told::Shared { region }) => write(region, channel.memory(region)),
            Some(Told::Event { .. }) => {
                for region in channel.regions() {
                    write(region, channel.memory(region));
                }
                println!("all are written again");
            }
            Some(Told::Gone(reason)) => println!("gone: {reason}"),
            _ => {}
        }
    }
}
