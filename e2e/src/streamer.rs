//! A client of a switch's entrance by streams (`stream=PATH`): frames with their length before them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vnplug_testing::PATIENCE;

/// A client, which waits for what it reads within a test's patience.
#[derive(Debug)]
pub struct Streamer(UnixStream);

/// A frame from one station to another with this number in it.
#[must_use]
pub fn frame(from: u8, to: u8, number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.resize(len, 0);
    frame
}

impl Streamer {
    /// Connects to the entrance.
    ///
    /// # Panics
    /// If nobody serves it.
    #[must_use]
    pub fn join(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("the entrance is there");
        let streamer = Self(stream);
        streamer.waits(PATIENCE);
        streamer
    }

    /// How long it waits for what it reads.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn waits(&self, limit: Duration) {
        let set = self.0.set_read_timeout(Some(limit));
        set.expect("a socket's limit can be set");
    }

    /// Sends a short frame from one station to another with this number in it.
    ///
    /// # Panics
    /// If the switch hung up.
    pub fn send(&mut self, from: u8, to: u8, number: u32) {
        self.put(&frame(from, to, number, 60)).expect("it is sent");
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// The switch hung up.
    pub fn put(&mut self, frame: &[u8]) -> io::Result<()> {
        let length = (frame.len() as u32).to_be_bytes();
        self.0.write_all(&[&length, frame].concat())
    }

    /// The number in the next frame; `None` if the switch hung up.
    pub fn number(&mut self) -> Option<u32> {
        number(&self.frame()?)
    }

    /// The number in the next frame that a client sent, whatever else is on the wire.
    pub fn heard(&mut self) -> Option<u32> {
        loop {
            let frame = self.frame()?;
            let number = number(&frame)?;
            // Those of before both had ports have none.
            if frame[12..14] == [0x88, 0xb5] && number > 0 {
                return Some(number);
            }
        }
    }

    /// The next frame; `None` if the switch hung up, or none came in time.
    pub fn frame(&mut self) -> Option<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        self.0.read_exact(&mut frame).ok()?;
        Some(frame)
    }
}

fn number(frame: &[u8]) -> Option<u32> {
    let bytes = frame.get(14..18)?.try_into().ok()?;
    Some(u32::from_be_bytes(bytes))
}
