//! vnplug-query: what `vnplug query` runs.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::new().filter_or("VNPLUG_LOG", "warn")).init();
    vnplug_store::extract::raise_open_files();
    vnplug_query::run(&vnplug_query::Arguments::parse())
}
