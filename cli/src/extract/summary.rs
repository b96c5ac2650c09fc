//! What an extract found, lost and could not read, as JSON.

use std::path::Path;

use serde_json::{Value, json};
use vnplug_store::extract::{Extract, Losses, Marks};
use vnplug_store::name::time;

/// One object; `problems` are those that were said on standard error.
pub(super) fn json(file: &Path, search: &Extract, bytes: u64, problems: &[String]) -> Value {
    let tally = search.tally();
    json!({
        "file": file,
        "packets": tally.packets,
        "captured_bytes": bytes,
        "out_of_order": tally.late,
        "segments": tally.segments,
        "bytes_read": tally.bytes_read,
        "chunks_left_out": tally.chunks_skipped,
        "losses": losses(search.losses()),
        "problems": problems,
    })
}

fn losses(losses: &Losses) -> Value {
    let marks = |marks: &Marks| json!({ "packets": marks.packets, "gaps": marks.gaps });
    let listed = losses.listed.iter().map(|loss| {
        json!({
            "kind": loss.kind,
            "packets": (!loss.is_gap()).then_some(loss.packets),
            "from": time(loss.from_ns),
            "to": time(loss.to_ns),
            "reason": loss.reason,
        })
    });
    json!({
        "told_by_packets": marks(&losses.told),
        "of_these_left_out": marks(&losses.left_out),
        "listed": listed.collect::<Vec<_>>(),
        "noted": losses.noted.iter().map(|(_, _, text)| text).collect::<Vec<_>>(),
        "older": losses.older,
    })
}
