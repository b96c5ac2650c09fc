//! Waiting that ends in an error: for the lab's own use, where a test would panic.

use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::error::{LabError, Result};

/// Waits until `ready` says yes.
///
/// # Errors
/// [`LabError::Timeout`] with `what`, if it does not within `limit`; what `ready` fails with.
pub(crate) fn until(
    what: impl FnOnce() -> String,
    limit: Duration,
    mut ready: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !ready()? {
        if Instant::now() >= deadline {
            let (what, after) = (what(), limit);
            return Err(LabError::Timeout { what, after });
        }
        sleep(PAUSE);
    }
    Ok(())
}

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
