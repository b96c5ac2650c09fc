//! A reader that goes on, or is told why it does not.

use std::time::Duration;

use vnplug::{Error, Next, Port};
use vnplug_testing::Deadline;

/// Reads until the port says why nothing comes any more.
///
/// # Panics
/// If its source ended, or it is not told in time.
#[must_use]
pub fn end_of(port: &mut Port) -> Error {
    let deadline = Deadline::new("the reader is told");
    loop {
        deadline.check();
        match port.next() {
            Ok(Next::Packet(_)) => {}
            Ok(Next::Nothing) => {
                if let Err(error) = port.wait(Some(Duration::from_millis(50))) {
                    return error;
                }
            }
            Ok(Next::Ended) => panic!("the source ended"),
            Err(error) => return error,
        }
    }
}

/// Waits until packets come that are not there yet.
///
/// # Panics
/// If they do not come in time.
pub fn reads_on(port: &mut Port) {
    let deadline = Deadline::new("the reader reads on");
    let mut left = 20_000;
    while left > 0 {
        deadline.check();
        match port.next().expect("it is read") {
            Next::Packet(_) => left -= 1,
            Next::Nothing => drop(
                port.wait(Some(Duration::from_millis(50)))
                    .expect("it waits"),
            ),
            Next::Ended => panic!("the source ended"),
        }
    }
}
