//! vnplug-web: a page with the timeline of recordings.

fn main() {}
