-- What job_submit.lua and cli_filter.lua share: they hand a batch script to ask.sh, which lies beside this file, and do
-- what it answers. Written for Lua 5.1 to 5.4. No function here raises an error, and without an answer a job passes,
-- unless memcalc.conf says ON_FAILURE=reject.
local memcalc = {}

local folder = debug.getinfo(1, "S").source:match("^@(.*)/[^/]*$") or "/etc/slurm/memcalc"
local LONGEST = 1024 * 1024 -- bytes of a script that is checked
local asleep_until = 0

-- The settings of memcalc.conf that are needed on this side of ask.sh.
local function settings()
    local found = { MODE = "reject", ON_FAILURE = "pass", JOBS = "gpu", TIMEOUT = "3", PAUSE = "60" }
    local file = io.open(folder .. "/memcalc.conf", "r")
    if file then
        for line in file:lines() do
            local name, value = line:match("^%s*([%u_]+)=[\"']?([%w]*)")
            if found[name] then
                found[name] = value
            end
        end
        file:close()
    end
    return found
end

-- Hand a job to ask.sh. Only the name of a temporary file is on the command line.
local function ask(job, limit)
    if #job.script > LONGEST then
        return nil, "the script is longer than " .. LONGEST .. " bytes"
    end
    local name = os.tmpname()
    local file = io.open(name, "w")
    local header = {}
    for _, text in ipairs({ job.directory or "", job.user or "", job.request or "" }) do
        header[#header + 1] = text:find("\n") and "" or text
    end
    local written = file and file:write(table.concat(header, "\n"), "\n", job.script)
    written = file and file:close() and written
    local line
    if written then
        -- ask.sh has its own limit; this one is for the case that it is stuck itself
        local command = "exec timeout -s KILL %d '%s/ask.sh' <%s 2>/dev/null"
        local pipe = io.popen(command:format(limit + 5, folder, name), "r")
        line = pipe and pipe:read("*l")
        if pipe then
            pipe:close()
        end
    end
    os.remove(name)
    return line, written and "no answer from " .. folder .. "/ask.sh" or "the script could not be written to /tmp"
end

-- Return what is to be done with a job ("pass", "warn" or "reject"), the kind of answer, and the sentence.
-- job has script, directory, user (a number), request (sbatch options) and gpus (whether it asks for any).
local function judge(job)
    local set = settings()
    local limit = tonumber(set.TIMEOUT) or 3
    if set.MODE == "off" or not job.script or not (job.gpus or set.JOBS == "all") then
        return "pass", "skipped", "memcalc: not asked"
    end
    if os.time() < asleep_until and set.ON_FAILURE ~= "reject" then
        return "pass", "skipped", "memcalc: not asked, it was too slow just now"
    end
    local called, line, trouble = pcall(ask, job, limit)
    local decision, kind, sentence = (called and line or ""):match("^(%l+) (%l+): (.*)$")
    if not decision then
        decision = set.MODE == "reject" and set.ON_FAILURE == "reject" and "reject" or "pass"
        kind, sentence = "failed", "memcalc: " .. tostring(called and trouble or line)
    end
    if kind == "slow" then
        asleep_until = os.time() + (tonumber(set.PAUSE) or 60)
    end
    return decision, kind, sentence
end

-- What the user is told of a rejection. Only a verdict is shown in full: any other sentence may quote a file that the
-- user named and only the controller may read.
local function told(kind, sentence)
    if kind == "verdict" then
        return sentence
    end
    return "memcalc: this job could not be checked, and unchecked jobs are not let in here; 'memcalc check' with your "
        .. "script says why"
end

-- Add "--NAME=VALUE" for each part of a list such as "gres:gpu:a100:8,gres:nvme:1" that is a number of GPUs.
local function add_gpus(request, list, ...)
    for part in (list or ""):gmatch("[^,]+") do
        local value = part:gsub("^gres[:/]", ""):match("^gpu[%w_:=.-]*$")
        value = value and value:gsub("=", ":")
        if value and not value:find("[:=]0$") then
            for _, option in ipairs({ ... }) do
                local count = option == "gres" and value or value:gsub("^gpu:?", "")
                request[#request + 1] = "--" .. option .. "=" .. (count == "" and "1" or count)
            end
        end
    end
end

local function job_submit(job_desc)
    local request = {}
    add_gpus(request, job_desc.tres_per_node, "gres", "gpus-per-node")
    add_gpus(request, job_desc.tres_per_job, "gpus")
    add_gpus(request, job_desc.tres_per_socket, "gpus-per-socket")
    add_gpus(request, job_desc.tres_per_task, "gpus-per-task")
    local gpus = #request > 0
    local nodes, tasks = job_desc.min_nodes, job_desc.num_tasks
    if nodes and nodes < slurm.NO_VAL then
        request[#request + 1] = ("--nodes=%d"):format(nodes)
    end
    if tasks and tasks < slurm.NO_VAL then
        request[#request + 1] = ("--ntasks=%d"):format(tasks)
    end
    local decision, kind, sentence = judge({
        script = job_desc.script,
        directory = job_desc.work_dir,
        user = ("%d"):format(job_desc.user_id),
        request = table.concat(request, " "),
        gpus = gpus,
    })
    if kind ~= "skipped" then
        slurm.log_info("memcalc: user %d: %s %s: %s", job_desc.user_id, decision, kind, sentence)
    end
    if decision == "reject" then
        slurm.log_user("%s", told(kind, sentence))
        return slurm.ERROR
    end
    if decision == "warn" and kind == "verdict" then
        slurm.log_user("%s", sentence)
    end
    return slurm.SUCCESS
end

local function cli_pre_submit(options)
    if options.type ~= "sbatch" then
        return slurm.SUCCESS
    end
    local request = {}
    add_gpus(request, options.gres, "gres")
    for _, option in ipairs({ "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task" }) do
        local value = options[option]
        if value and value:find("^[%w_:.-]+$") and value ~= "0" then
            request[#request + 1] = "--" .. option .. "=" .. value
        end
    end
    local gpus = #request > 0
    -- what was not said reads as nodes 1-0 and ntasks 1
    local nodes, tasks = options.nodes or "", options.ntasks or ""
    if nodes:find("^%d+") and nodes ~= "1-0" then
        request[#request + 1] = "--nodes=" .. nodes:match("^%d+")
    end
    if tasks:find("^%d+$") and tasks ~= "1" then
        request[#request + 1] = "--ntasks=" .. tasks
    end
    local file = options.argv[1] and io.open(options.argv[1], "r")
    local script = options.wrap and "#!/bin/sh\n" .. options.wrap
    if file then
        script = file:read(LONGEST + 1)
        file:close()
    end
    local decision, kind, sentence = judge({
        script = script or nil,
        directory = options.chdir or os.getenv("PWD"),
        request = table.concat(request, " "),
        gpus = gpus,
    })
    if decision == "reject" or (decision == "warn" and kind == "verdict") then
        io.stderr:write("sbatch: error: ", sentence, "\n") -- slurm.log_error would put "lua: " before it
    end
    return decision == "reject" and slurm.ERROR or slurm.SUCCESS
end

-- A function whose errors are logged and let the job through: they are ours, not the job's.
local function guarded(name, work)
    return function(...)
        local called, answer = pcall(work, ...)
        if called then
            return answer
        end
        slurm.log_info("memcalc: error in %s: %s", name, tostring(answer))
        return slurm.SUCCESS
    end
end

-- For slurm_job_submit: slurm.SUCCESS, or slurm.ERROR with the sentence told to the user.
memcalc.job_submit = guarded("job_submit", job_submit)

-- For slurm_cli_pre_submit: the same as the user, in sbatch itself, before the controller is asked.
memcalc.cli_pre_submit = guarded("cli_pre_submit", cli_pre_submit)

return memcalc
